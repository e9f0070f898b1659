module @scatter attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 3 : i32} {
  func.func public @main(%arg0: tensor<3x512x128xui32>) -> (tensor<1x512x128xui32>) {
    %0 = stablehlo.replica_id : tensor<ui32>
    %1 = stablehlo.constant dense<[1, 0, 0]> : tensor<3xui32>
    %2 = stablehlo.dynamic_slice %1, %0, sizes = [1] : (tensor<3xui32>, tensor<ui32>) -> tensor<1xui32>
    %3 = stablehlo.reshape %2 : (tensor<1xui32>) -> tensor<ui32>
    %4 = stablehlo.constant dense<1> : tensor<ui32>
    %5 = stablehlo.compare EQ, %3, %4, UNSIGNED : (tensor<ui32>, tensor<ui32>) -> tensor<i1>
    %6 = stablehlo.constant dense<0> : tensor<i32>
    %7 = stablehlo.constant dense<0> : tensor<i32>
    %8 = stablehlo.constant dense<3> : tensor<i32>
    %9 = stablehlo.add %6, %7 : tensor<i32>
    %10 = stablehlo.remainder %9, %8 : tensor<i32>
    %11 = stablehlo.constant dense<0> : tensor<i32>
    %12 = stablehlo.dynamic_slice %arg0, %10, %11, %11, sizes = [1, 512, 128] : (tensor<3x512x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x512x128xui32>
    %13 = "stablehlo.collective_permute"(%12) {source_target_pairs = dense<[[1, 0]]> : tensor<1x2xi64>} : (tensor<1x512x128xui32>) -> tensor<1x512x128xui32>
    %14 = stablehlo.constant dense<1> : tensor<i32>
    %15 = stablehlo.constant dense<3> : tensor<i32>
    %16 = stablehlo.add %6, %14 : tensor<i32>
    %17 = stablehlo.remainder %16, %15 : tensor<i32>
    %18 = stablehlo.constant dense<0> : tensor<i32>
    %19 = stablehlo.dynamic_slice %arg0, %17, %18, %18, sizes = [1, 512, 128] : (tensor<3x512x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x512x128xui32>
    %20 = stablehlo.broadcast_in_dim %5, dims = [] : (tensor<i1>) -> tensor<1x512x128xi1>
    %21 = stablehlo.select %20, %13, %19 : tensor<1x512x128xi1>, tensor<1x512x128xui32>
    %22 = stablehlo.constant dense<0> : tensor<i32>
    %23 = stablehlo.dynamic_update_slice %arg0, %21, %17, %22, %22 : (tensor<3x512x128xui32>, tensor<1x512x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x512x128xui32>
    %24 = stablehlo.replica_id : tensor<ui32>
    %25 = stablehlo.constant dense<[0, 0, 1]> : tensor<3xui32>
    %26 = stablehlo.dynamic_slice %25, %24, sizes = [1] : (tensor<3xui32>, tensor<ui32>) -> tensor<1xui32>
    %27 = stablehlo.reshape %26 : (tensor<1xui32>) -> tensor<ui32>
    %28 = stablehlo.constant dense<1> : tensor<ui32>
    %29 = stablehlo.compare EQ, %27, %28, UNSIGNED : (tensor<ui32>, tensor<ui32>) -> tensor<i1>
    %30 = stablehlo.constant dense<0> : tensor<i32>
    %31 = stablehlo.constant dense<2> : tensor<i32>
    %32 = stablehlo.constant dense<3> : tensor<i32>
    %33 = stablehlo.add %30, %31 : tensor<i32>
    %34 = stablehlo.remainder %33, %32 : tensor<i32>
    %35 = stablehlo.constant dense<0> : tensor<i32>
    %36 = stablehlo.dynamic_slice %23, %34, %35, %35, sizes = [1, 512, 128] : (tensor<3x512x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x512x128xui32>
    %37 = "stablehlo.collective_permute"(%36) {source_target_pairs = dense<[[1, 2]]> : tensor<1x2xi64>} : (tensor<1x512x128xui32>) -> tensor<1x512x128xui32>
    %38 = stablehlo.constant dense<1> : tensor<i32>
    %39 = stablehlo.constant dense<3> : tensor<i32>
    %40 = stablehlo.add %30, %38 : tensor<i32>
    %41 = stablehlo.remainder %40, %39 : tensor<i32>
    %42 = stablehlo.constant dense<0> : tensor<i32>
    %43 = stablehlo.dynamic_slice %23, %41, %42, %42, sizes = [1, 512, 128] : (tensor<3x512x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x512x128xui32>
    %44 = stablehlo.broadcast_in_dim %29, dims = [] : (tensor<i1>) -> tensor<1x512x128xi1>
    %45 = stablehlo.select %44, %37, %43 : tensor<1x512x128xi1>, tensor<1x512x128xui32>
    %46 = stablehlo.constant dense<0> : tensor<i32>
    %47 = stablehlo.dynamic_update_slice %23, %45, %41, %46, %46 : (tensor<3x512x128xui32>, tensor<1x512x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x512x128xui32>
    %48 = stablehlo.slice %47 [1:2, 0:512, 0:128] : (tensor<3x512x128xui32>) -> tensor<1x512x128xui32>
    return %48 : tensor<1x512x128xui32>
  }
}
