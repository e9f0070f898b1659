module @gather attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 3 : i32} {
  func.func public @main(%arg0: tensor<1x512x128xui32>) -> (tensor<3x512x128xui32>) {
    %0 = stablehlo.constant dense<0> : tensor<3x512x128xui32>
    %1 = stablehlo.constant dense<1> : tensor<i32>
    %2 = stablehlo.constant dense<0> : tensor<i32>
    %3 = stablehlo.dynamic_update_slice %0, %arg0, %1, %2, %2 : (tensor<3x512x128xui32>, tensor<1x512x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x512x128xui32>
    %4 = stablehlo.constant dense<0> : tensor<i32>
    %5 = stablehlo.constant dense<1> : tensor<i32>
    %6 = stablehlo.constant dense<3> : tensor<i32>
    %7 = stablehlo.add %4, %5 : tensor<i32>
    %8 = stablehlo.remainder %7, %6 : tensor<i32>
    %9 = stablehlo.constant dense<0> : tensor<i32>
    %10 = stablehlo.dynamic_slice %3, %8, %9, %9, sizes = [1, 512, 128] : (tensor<3x512x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x512x128xui32>
    %11 = "stablehlo.collective_permute"(%10) {source_target_pairs = dense<[[2, 1]]> : tensor<1x2xi64>} : (tensor<1x512x128xui32>) -> tensor<1x512x128xui32>
    %12 = stablehlo.constant dense<2> : tensor<i32>
    %13 = stablehlo.constant dense<3> : tensor<i32>
    %14 = stablehlo.add %4, %12 : tensor<i32>
    %15 = stablehlo.remainder %14, %13 : tensor<i32>
    %16 = stablehlo.constant dense<0> : tensor<i32>
    %17 = stablehlo.dynamic_update_slice %3, %11, %15, %16, %16 : (tensor<3x512x128xui32>, tensor<1x512x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x512x128xui32>
    %18 = stablehlo.constant dense<0> : tensor<i32>
    %19 = stablehlo.constant dense<1> : tensor<i32>
    %20 = stablehlo.constant dense<3> : tensor<i32>
    %21 = stablehlo.add %18, %19 : tensor<i32>
    %22 = stablehlo.remainder %21, %20 : tensor<i32>
    %23 = stablehlo.constant dense<0> : tensor<i32>
    %24 = stablehlo.dynamic_slice %17, %22, %23, %23, sizes = [1, 512, 128] : (tensor<3x512x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x512x128xui32>
    %25 = "stablehlo.collective_permute"(%24) {source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<1x512x128xui32>) -> tensor<1x512x128xui32>
    %26 = stablehlo.constant dense<0> : tensor<i32>
    %27 = stablehlo.constant dense<3> : tensor<i32>
    %28 = stablehlo.add %18, %26 : tensor<i32>
    %29 = stablehlo.remainder %28, %27 : tensor<i32>
    %30 = stablehlo.constant dense<0> : tensor<i32>
    %31 = stablehlo.dynamic_update_slice %17, %25, %29, %30, %30 : (tensor<3x512x128xui32>, tensor<1x512x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x512x128xui32>
    return %31 : tensor<3x512x128xui32>
  }
}
