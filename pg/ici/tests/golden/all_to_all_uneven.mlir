module @all_to_all_uneven attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
  func.func public @main(%arg0: tensor<3x8x128xui32>, %arg1: tensor<2xi32>, %arg2: tensor<2xi32>) -> (tensor<3x8x128xui32>) {
    %0 = stablehlo.constant dense<0> : tensor<1x8x128xui32>
    %1 = stablehlo.concatenate %arg0, %0, dim = 0 : (tensor<3x8x128xui32>, tensor<1x8x128xui32>) -> tensor<4x8x128xui32>
    %2 = stablehlo.constant dense<1> : tensor<i32>
    %3 = stablehlo.constant dense<0> : tensor<2x8x128xui32>
    %4 = stablehlo.constant dense<0> : tensor<i32>
    %5 = stablehlo.constant dense<1> : tensor<i32>
    %6 = stablehlo.constant dense<2> : tensor<i32>
    %7:2 = stablehlo.while(%i7 = %4, %c7 = %3) : tensor<i32>, tensor<2x8x128xui32> cond {
    %8 = stablehlo.compare LT, %i7, %6, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %8 : tensor<i1>
    } do {
    %9 = stablehlo.dynamic_slice %arg1, %i7, sizes = [1] : (tensor<2xi32>, tensor<i32>) -> tensor<1xi32>
    %10 = stablehlo.reshape %9 : (tensor<1xi32>) -> tensor<i32>
    %11 = stablehlo.constant dense<0> : tensor<i32>
    %12 = stablehlo.dynamic_slice %1, %10, %11, %11, sizes = [1, 8, 128] : (tensor<4x8x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x128xui32>
    %13 = stablehlo.multiply %i7, %2 : tensor<i32>
    %14 = stablehlo.constant dense<0> : tensor<i32>
    %15 = stablehlo.dynamic_update_slice %c7, %12, %13, %14, %14 : (tensor<2x8x128xui32>, tensor<1x8x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<2x8x128xui32>
    %16 = stablehlo.add %i7, %5 : tensor<i32>
    stablehlo.return %16, %15 : tensor<i32>, tensor<2x8x128xui32>
    }
    %17 = "stablehlo.all_to_all"(%7#1) {split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = 2 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2x8x128xui32>) -> tensor<2x8x128xui32>
    %18 = stablehlo.constant dense<0> : tensor<4x8x128xui32>
    %19 = stablehlo.constant dense<0> : tensor<i32>
    %20 = stablehlo.constant dense<1> : tensor<i32>
    %21 = stablehlo.constant dense<2> : tensor<i32>
    %22:2 = stablehlo.while(%i22 = %19, %c22 = %18) : tensor<i32>, tensor<4x8x128xui32> cond {
    %23 = stablehlo.compare LT, %i22, %21, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %23 : tensor<i1>
    } do {
    %24 = stablehlo.dynamic_slice %arg2, %i22, sizes = [1] : (tensor<2xi32>, tensor<i32>) -> tensor<1xi32>
    %25 = stablehlo.reshape %24 : (tensor<1xi32>) -> tensor<i32>
    %26 = stablehlo.multiply %i22, %2 : tensor<i32>
    %27 = stablehlo.constant dense<0> : tensor<i32>
    %28 = stablehlo.dynamic_slice %17, %26, %27, %27, sizes = [1, 8, 128] : (tensor<2x8x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x128xui32>
    %29 = stablehlo.constant dense<0> : tensor<i32>
    %30 = stablehlo.dynamic_update_slice %c22, %28, %25, %29, %29 : (tensor<4x8x128xui32>, tensor<1x8x128xui32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<4x8x128xui32>
    %31 = stablehlo.add %i22, %20 : tensor<i32>
    stablehlo.return %31, %30 : tensor<i32>, tensor<4x8x128xui32>
    }
    %32 = stablehlo.slice %22#1 [0:3, 0:8, 0:128] : (tensor<4x8x128xui32>) -> tensor<3x8x128xui32>
    return %32 : tensor<3x8x128xui32>
  }
}
